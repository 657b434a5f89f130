"""The explorer: one offline page to look at a model of any size.

``nodes`` joins the dataflow with the rows of the tree, ``data`` writes both as plain JSON, and ``page`` packs that with
the front end in ``views/static/explorer``.
"""
