"""What several tests share: examples, recordings, runners."""
