"""The style of the page: no fonts and no pictures from elsewhere, colours for light and dark."""

from __future__ import annotations

CSS = """
:root { --paper:#fbfaf7; --card:#fff; --ink:#22201c; --weak:#6b665c; --line:#e0dbd0;
  --good:#1d6b35; --bad:#a3231b; --clay:#b4552d;
  --ready:#d9eedd; --builds:#f6e7c4; --reference:#ece8df; --fails:#f6d9d5; }
@media (prefers-color-scheme: dark) { :root { --paper:#171614; --card:#201e1b; --ink:#ece7dc;
  --weak:#a49c8c; --line:#38342d; --good:#7fcf95; --bad:#f08d83; --clay:#e08a5b;
  --ready:#1f3d28; --builds:#463716; --reference:#2e2b26; --fails:#4a211d; } }
* { box-sizing:border-box; }
body { margin:0; padding:1.5rem; background:var(--paper); color:var(--ink);
  font:15px/1.5 system-ui, sans-serif; }
header, main { max-width:72rem; margin:0 auto; }
h1 { font-size:1.5rem; margin:0; } h2 { font-size:1.1rem; margin:0 0 .6rem; }
h3 { font-size:.95rem; margin:.8rem 0 .3rem; } h4 { font-size:.9rem; margin:.8rem 0 .2rem; }
h1::before { content:""; display:inline-block; width:.7em; height:.7em; margin-right:.4em;
  background:var(--clay); border-radius:50% 50% 15% 15%; }
header p { margin:.2rem 0 .8rem; }
section { background:var(--card); border:1px solid var(--line); border-radius:8px;
  padding:1rem 1.2rem; margin:1rem 0; overflow-x:auto; }
.summary { list-style:none; display:flex; flex-wrap:wrap; gap:.4rem; padding:0; margin:0; }
.summary li { background:var(--card); border:1px solid var(--line); border-radius:99px;
  padding:.1rem .8rem; }
.weak { color:var(--weak); font-weight:normal; } .good { color:var(--good); }
.bad { color:var(--bad); }
code { font:.87em ui-monospace, monospace; overflow-wrap:anywhere; }
table { border-collapse:collapse; width:100%; }
th, td { text-align:left; vertical-align:top; padding:.3rem .6rem;
  border-bottom:1px solid var(--line); overflow-wrap:anywhere; }
.facts th { width:13rem; font-weight:600; } tr:last-child > * { border-bottom:0; }
.grid thead th { color:var(--weak); font-weight:normal; } .grid th[scope=row] { width:15rem; }
.grid td:last-child { width:45%; }
.ready { background:var(--ready); } .builds { background:var(--builds); }
.reference { background:var(--reference); } .fails { background:var(--fails); }
.none { color:var(--weak); } .origin { white-space:nowrap; }
.legend span { padding:.1rem .5rem; border-radius:4px; margin-right:.3rem; }
.grid .ready, .grid .builds, .grid .reference, .grid .fails, .grid .none { white-space:nowrap; }
summary { cursor:pointer; } details p { margin:.2rem 0; }
.trace { margin:.2rem 0 .6rem; padding-left:1.4rem; }
.tree, .tree ul { list-style:none; padding-left:0; margin:0; }
.tree ul { padding-left:1.1rem; margin-left:.3rem; border-left:1px solid var(--line); }
.tree li { margin:.25rem 0; } .tree summary { font-weight:600; }
.problems { margin:0; padding-left:1.2rem; } .problems li { margin:.3rem 0; }
.build { display:grid; grid-template-columns:16rem 1fr 10rem; gap:.8rem; align-items:center;
  padding:.1rem 0; }
.lane { background:var(--reference); border-radius:3px; overflow:hidden; }
.bar { display:block; height:.9rem; background:var(--clay); border-radius:3px; }
@media (max-width: 45rem) { .build { grid-template-columns:1fr; gap:.1rem; }
  .facts th { width:auto; } }
"""
