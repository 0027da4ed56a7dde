//! One self-contained HTML page: machine, plots, table and every cell. No script, and no external resources.

use super::{COUNTS, base, count, measured_columns, plot, provenance, rate, ratio, remarks};
use crate::failure::Failure;
use crate::figures;
use crate::report::{Cell, Report};
use crate::summary::{Section, cell_ratio, counts, overall, sections, spread};
use crate::table::COUNT;

const STYLE: &str = "body{font:15px/1.45 system-ui,sans-serif;margin:2rem auto;max-width:76rem;padding:0 1rem;color:#1d2733}\
table{border-collapse:collapse;font-variant-numeric:tabular-nums;margin:.5rem 0 1.5rem}\
.wide{overflow-x:auto}.wide svg{min-width:48rem}\
th,td{padding:.2rem .6rem;text-align:right;border-bottom:1px solid #d9dee4;white-space:nowrap}\
th:first-child,td:first-child{text-align:left}small{color:#66717d}.slow{background:#fbe3df}.fast{background:#e0f2e5}\
svg{max-width:100%;height:auto}pre{overflow-x:auto;background:#f4f6f8;padding:1rem}h2{margin-top:2rem}";

/// Returns the page.
pub fn page(report: &Report) -> Result<String, Failure> {
    let sections = sections(report);
    let title = format!("nacre bench {}: {}", report.table, report.title);
    let mut out = format!(
        "<!DOCTYPE html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"><meta name=\"viewport\" content=\"width=device-width,initial-scale=1\"><title>{0}</title><style>{STYLE}</style></head><body>\n<h1>{0}</h1>\n<ul>",
        escape(&title)
    );
    for line in provenance(report).iter().chain(&remarks(report)) {
        out.push_str(&format!("<li>{}</li>", escape(line)));
    }
    let base = escape(base(report));
    out.push_str(&format!("</ul>\n<p>Cells are ratios of times to {base}: shorter is better.</p>\n"));
    for section in &sections {
        out.push_str(&format!(
            "<h2>{}</h2>\n<div class=\"wide\">{}</div>\n",
            escape(&section.title),
            plot::ratios(report, section)?
        ));
        table(&mut out, report, section);
    }
    count_table(&mut out, report);
    means(&mut out, report, &sections);
    let curves = plot::curves(report)?;
    if !curves.is_empty() {
        out.push_str("<h2>Throughput by file size</h2>\n");
        curves.iter().for_each(|curve| out.push_str(&format!("<div class=\"wide\">{curve}</div>\n")));
    }
    let verdicts = figures::judge_table(report)?;
    if verdicts.iter().any(|verdict| verdict.reached.is_some()) {
        out.push_str(&format!("<h2>Promised and reached</h2>\n<pre>{}</pre>\n", escape(&figures::text(&verdicts))));
    }
    cells(&mut out, report);
    out.push_str("</body></html>\n");
    Ok(out)
}

fn heading(out: &mut String, report: &Report, columns: &[usize]) {
    out.push_str("<div class=\"wide\"><table><tr><th>test</th>");
    for target in columns.iter().filter_map(|column| report.targets.get(*column)) {
        out.push_str(&format!("<th>{}</th>", escape(&target.title)));
    }
    out.push_str("</tr>\n");
}

fn count_table(out: &mut String, report: &Report) {
    let (columns, counts) = (measured_columns(report), counts(report));
    if counts.is_empty() {
        return;
    }
    out.push_str(&format!("<h2>{COUNTS}</h2>\n"));
    heading(out, report, &columns);
    for row in counts {
        out.push_str(&format!("<tr><td>{}</td>", escape(&row.title)));
        for column in &columns {
            match row.values.get(*column).copied().flatten() {
                None => out.push_str("<td>-</td>"),
                Some(bytes) => out.push_str(&format!(
                    "<td{}>{}</td>",
                    if bytes > 0.0 { " class=\"slow\"" } else { "" },
                    count(bytes)
                )),
            }
        }
        out.push_str("</tr>\n");
    }
    out.push_str("</table></div>\n");
}

fn table(out: &mut String, report: &Report, section: &Section) {
    let columns = measured_columns(report);
    heading(out, report, &columns);
    for row in &section.rows {
        out.push_str(&format!("<tr><td>{}</td>", escape(&row.title)));
        for column in &columns {
            let target = report.targets.get(*column);
            match row.entries.get(*column).copied().flatten() {
                None => out.push_str("<td>-</td>"),
                Some(entry) if target.is_some_and(|target| target.id == target.baseline) => {
                    out.push_str(&format!("<td>{}</td>", rate(entry.rate, &row.unit)));
                }
                Some(entry) => {
                    out.push_str(&format!("<td{}>{}</td>", class(entry.ratio), ratio(entry.ratio)));
                }
            }
        }
        out.push_str("</tr>\n");
    }
    out.push_str("</table></div>\n");
}

/// Returns the style of a cell: only differences beyond the noise of a run are coloured.
fn class(ratio: f64) -> &'static str {
    match ratio {
        ratio if ratio > 1.25 => " class=\"slow\"",
        ratio if ratio < 0.8 => " class=\"fast\"",
        _ => "",
    }
}

fn means(out: &mut String, report: &Report, sections: &[Section]) {
    out.push_str("<h2>Mean of all rows</h2>\n<div class=\"wide\"><table>");
    for (target, mean) in report.targets.iter().zip(overall(report, sections)) {
        if let Some(mean) = mean.filter(|_| target.id != target.baseline) {
            out.push_str(&format!(
                "<tr><td>{}</td><td{}>{}</td></tr>",
                escape(&target.title),
                class(mean),
                ratio(mean)
            ));
        }
    }
    out.push_str("</table></div>\n");
}

fn cells(out: &mut String, report: &Report) {
    out.push_str(
        "<details><summary>Every measurement</summary><div class=\"wide\"><table><tr><th>test</th><th>target</th><th>file KiB</th><th>record KiB</th>",
    );
    out.push_str("<th>median s</th><th>min s</th><th>max s</th><th>ratio</th></tr>\n");
    let counted = |cell: &Cell| report.tests.iter().any(|test| test.id == cell.test && test.unit == COUNT);
    for cell in report.cells.iter().filter(|cell| !counted(cell)) {
        let Some(spread) = spread(cell) else { continue };
        let base =
            report.targets.iter().find(|target| target.id == cell.target).map_or("", |target| target.baseline.as_str());
        let (file, record) = cell
            .point
            .map_or_else(Default::default, |point| ((point.file >> 10).to_string(), (point.record >> 10).to_string()));
        let own = cell_ratio(report, cell, base).map_or_else(String::new, ratio);
        out.push_str(&format!(
            "<tr><td>{}</td><td>{}</td><td>{file}</td><td>{record}</td><td>{:.6}</td><td>{:.6}</td><td>{:.6}</td><td>{own}</td></tr>\n",
            escape(&cell.test),
            escape(&cell.target),
            spread.median,
            spread.minimum,
            spread.maximum
        ));
    }
    out.push_str("</table></div></details>\n");
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sample_report::report;

    #[test]
    fn the_page_stands_alone() {
        let page = page(&report()).unwrap();
        assert!(page.starts_with("<!DOCTYPE html>"));
        assert!(page.matches("<svg").count() >= 3, "two bar plots and a curve");
        assert_eq!(page.matches("<svg").count(), page.matches("</svg>").count());
        for foreign in ["<script", "src=", "href=", "@import", "url("] {
            assert!(!page.contains(foreign), "{foreign}");
        }
        assert!(page.contains("<td>full: over the limit</td><td>-</td><td class=\"slow\">4096</td>"));
        assert!(page.contains("Example &lt;9000&gt;"));
        let scrolled =
            page.matches("<div class=\"wide\"><table>").count() + page.matches("<div class=\"wide\"><svg").count();
        assert_eq!(
            scrolled,
            page.matches("<table>").count() + page.matches("<svg").count(),
            "what is wide scrolls on a narrow screen"
        );
        assert_eq!(page.matches("<div").count(), page.matches("</div>").count());
        assert!(page.contains("name=\"viewport\""));
        assert!(page.contains("<td class=\"slow\">2.00x</td>"));
    }
}
