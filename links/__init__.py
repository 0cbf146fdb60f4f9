"""Where deliveries come from and letters go to: one subpackage per transport, `abc` and `errors` for all."""
