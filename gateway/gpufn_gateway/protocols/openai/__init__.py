"""OpenAI's API for functions that declare `serves="openai-chat"` or `serves="openai-embeddings"`."""
