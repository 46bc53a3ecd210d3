"""The formats of preference data: from a row to a pair."""
