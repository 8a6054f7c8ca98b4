"""Many strategies side by side: presets and files of one's own, carried out run by run and gone on with after a stop."""
