"""The window: a local web page over what runs have recorded.

Jinja2 renders the pages, htmx replaces parts of them while a run trains, and ECharts draws. So a
page is readable without JavaScript, there is no build step, and a view is a function that returns
one template. Views read stores by read-only connections.
"""
