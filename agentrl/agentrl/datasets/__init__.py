"""Read examples: files of records, chats and their tokens, and what our own store has recorded."""
