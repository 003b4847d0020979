"""What each request used: integers only; knows no HTTP and no model."""
