"""What serving on chips that are not there would be like. No daemon imports it."""
