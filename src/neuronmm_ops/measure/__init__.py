"""What models and ops take on this machine: times, memory and quality, in paired rounds."""
