"""What other libraries need to work in ranks, or with them."""
