"""Files of ETL, loaders and training: places, the division of rows among ranks, and folders that appear complete."""
