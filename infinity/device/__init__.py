"""Where units compute: CPU or CUDA, its streams and its buffers."""
