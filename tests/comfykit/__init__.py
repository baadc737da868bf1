"""What tests of backends share: prompts, a meddling proxy, a server that follows a script."""
