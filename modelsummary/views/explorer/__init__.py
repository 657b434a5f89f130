"""The explorer: one offline page to look at a model of any size.

``flow`` reads the dataflow of a record, ``nodes`` joins it with the rows of the tree, ``data`` writes both as plain
JSON, and ``page`` packs that with the front end in ``views/static/explorer``.
"""
