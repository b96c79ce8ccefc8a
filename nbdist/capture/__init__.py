"""What a call takes along, as bytes and back."""
