"""The console in a real Chromium; make test-browser runs these."""
