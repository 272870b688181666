"""The service: what stays up while trainings come and go."""
