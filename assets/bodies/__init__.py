"""What each asset does when it is materialized."""
