"""Models for pages, and the data of a page."""

from __future__ import annotations

import json
import re

from torch import nn

NASTY = "<script>alert('x')</script><img src=x onerror=alert(1)>\"&amp;"


def nasty_model():
    model = nn.Sequential(nn.Linear(2, 2))
    model.add_module(NASTY.replace(".", " "), nn.ReLU())
    return model


def data_of(html):
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', html, re.DOTALL)[1])
