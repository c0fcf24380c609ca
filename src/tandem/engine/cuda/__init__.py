"""How the native engine runs on a GPU. Nothing in here is imported elsewhere before a GPU and Triton are found."""
