"""What an ingestor does with payloads and dumps; no Ray in here."""
