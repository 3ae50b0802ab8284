"""The largest worker batch that fits: predicted, then tried in processes of their own."""
