"""What tests of the engine share: small node types, prompts, and a talking client."""
