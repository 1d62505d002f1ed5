"""What the compiler says of steps on TPUs that are not there."""
