"""What a new policy starts from."""
