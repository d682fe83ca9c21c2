"""An HTTP server in the shape of OpenAI's API, with a chat page, over one engine."""
