"""How a chat request becomes tokens and back, recorded token for token."""
