"""The CSS of the report: one column of at most 1080 pixels, system fonts, light and dark colours."""

CSS = """
:root{--paper:#fbfbfa;--card:#fff;--ink:#22272e;--soft:#68727d;--line:#e4e7eb;--accent:#2f6db5;--good:#25896b;
--bad:#c0433b;--busy:#b5740f}
@media(prefers-color-scheme:dark){:root{--paper:#0f1216;--card:#161a1f;--ink:#e3e7ec;--soft:#98a2ad;--line:#2a3038;
--accent:#6ea8e6;--good:#57bd9b;--bad:#ee837b;--busy:#eb9f52}}
*{box-sizing:border-box}html{background:var(--paper)}
body{margin:0 auto;max-width:1080px;padding:40px 24px 64px;color:var(--ink);background:var(--paper);
font:15px/1.55 system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",sans-serif;
font-variant-numeric:tabular-nums}
header{margin-bottom:28px}h1{font-size:30px;line-height:1.2;letter-spacing:-.02em;margin:0 12px 0 0;display:inline}
h2{font-size:18px;letter-spacing:-.01em;margin:44px 0 12px}h3{font-size:14px;margin:20px 0 6px}
p{margin:6px 0 12px;max-width:70ch}.soft,figcaption,.note{color:var(--soft);font-size:13px}
.state{display:inline-block;padding:2px 10px;border-radius:99px;border:1px solid currentColor;font-size:13px;
font-weight:600;vertical-align:6px;color:var(--busy)}.state.good{color:var(--good)}.state.bad{color:var(--bad)}
dl.facts{display:grid;grid-template-columns:repeat(auto-fit,minmax(128px,1fr));gap:0;margin:22px 0 0;
background:var(--card);border:1px solid var(--line);border-radius:10px;overflow:hidden}
dl.facts div{padding:12px 16px;box-shadow:1px 0 0 var(--line),0 1px 0 var(--line)}
dl.facts dt{color:var(--soft);font-size:12px}
dl.facts dd{margin:2px 0 0;font-size:19px;font-weight:600;letter-spacing:-.01em}
dl.facts small{display:block;font-weight:400;font-size:12px;color:var(--soft);letter-spacing:0}
.grid{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(440px,100%),1fr));gap:16px}
figure{margin:0;background:var(--card);border:1px solid var(--line);border-radius:10px;padding:16px 18px 10px}
.below{margin-top:16px}figcaption{margin:4px 0 4px}
.wide{overflow-x:auto;background:var(--card);border:1px solid var(--line);border-radius:10px;margin-top:16px}
table{border-collapse:collapse;width:100%;font-size:14px}
th,td{text-align:left;padding:8px 14px;border-top:1px solid var(--line);vertical-align:top}
thead th{border-top:0;color:var(--soft);font-weight:500;font-size:12px;white-space:nowrap}
td.n,th.n{text-align:right;white-space:nowrap}td.v{font-weight:600}td.k{white-space:nowrap}
pre,code{font:12.5px/1.5 ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace}
pre{margin:0;padding:14px 16px;overflow-x:auto;white-space:pre-wrap;overflow-wrap:anywhere}
.sample{background:var(--card);border:1px solid var(--line);border-radius:10px;margin:12px 0;overflow:hidden}
.sample .soft{padding:8px 16px 0}.sample .given{color:var(--soft)}
details{background:var(--card);border:1px solid var(--line);border-radius:10px;margin:10px 0}
summary{cursor:pointer;padding:10px 16px;font-weight:500}details pre{border-top:1px solid var(--line)}
.wide+.note{margin-top:28px}.note.bad{color:var(--bad)}details .sample{margin:12px 16px}
.right{color:var(--good)}.wrong{color:var(--bad)}
footer{margin-top:48px;color:var(--soft);font-size:12px}
.at-narrow{display:none}
@media(max-width:640px){body{padding:24px 14px 48px}figure{padding:12px 10px 8px}
.at-wide{display:none}.at-narrow{display:block}thead{display:none}table,tbody{display:block}
tr{display:block;padding:10px 12px;border-top:1px solid var(--line)}tr:first-child{border-top:0}
td,td.n,td.k{display:grid;grid-template-columns:96px minmax(0,1fr);border:0;padding:1px 0;text-align:left;
white-space:normal;overflow-wrap:anywhere}td:empty{display:none}
td::before{content:attr(data-of);color:var(--soft);font-weight:400;font-size:12px}}
@media print{html,body{background:#fff}figure,.sample,details{break-inside:avoid}}
"""
"""The page's style, beside ``base.chart.CSS``."""
