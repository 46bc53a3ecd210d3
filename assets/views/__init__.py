"""Tables, pictures and pages about artifacts."""
