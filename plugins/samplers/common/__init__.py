"""What samplers share."""
