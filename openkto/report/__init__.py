"""What a run says of itself: metrics, throughput, trackers, records."""
