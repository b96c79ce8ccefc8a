"""Files of ETL, loaders and training: where they are, whose rows are in them, and folders that appear whole."""
