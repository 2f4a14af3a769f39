"""What many tests share."""
