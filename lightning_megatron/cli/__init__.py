"""What a user calls from a shell."""
