"""What an operator sees: logs, metrics, and the HTTP endpoint that serves them."""
