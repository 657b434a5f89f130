"""What a run may change, and how it is put back."""
