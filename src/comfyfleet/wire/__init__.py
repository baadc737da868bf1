"""What control plane and worker say to each other. Neither knows more of the other than this."""
