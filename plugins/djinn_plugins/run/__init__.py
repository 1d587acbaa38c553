"""Library: running programs that do not mention djinn, and the plugin kind ``mode``, the ways to do that."""
