"""The ways to bring hexserve up."""
