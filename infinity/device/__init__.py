"""Where units compute: the CPU or an accelerator, its streams and its buffers."""
