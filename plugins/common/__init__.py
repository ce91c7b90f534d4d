"""What plugins of several kinds share."""
