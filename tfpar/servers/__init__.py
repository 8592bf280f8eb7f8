"""Parameter servers: variables on some processes, steps on others."""
