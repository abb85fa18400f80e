"""The mesh, the table from logical axes to mesh axes, communication between devices, and rematerialisation."""
