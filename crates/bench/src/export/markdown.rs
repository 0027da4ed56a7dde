//! A Markdown table between two markers, so that a document keeps its prose when its numbers are
//! renewed.

use super::{COUNTS, count, measured_columns, provenance, rate, ratio, remarks};
use crate::failure::Failure;
use crate::figures::{self, Verdict};
use crate::report::Report;
use crate::summary::{counts, overall, sections};

/// Returns the markers of a table. It may be in a document several times, measured with different amounts: each
/// under a section's name.
fn markers(table: &str, section: Option<&str>) -> (String, String) {
    let name = section.map_or_else(|| table.to_owned(), |section| format!("{table} {section}"));
    (format!("<!-- nacre bench {name}: begin -->"), format!("<!-- nacre bench {name}: end -->"))
}

/// Replaces the part of `old` between the markers of the table's section, or appends it with both markers.
pub fn replace(old: &str, section: Option<&str>, report: &Report) -> Result<String, Failure> {
    let (begin, end) = markers(&report.table, section);
    let part = format!("{begin}\n{}{end}", table(report)?);
    Ok(match place(old, &report.table, section)? {
        None => {
            let gap = if old.is_empty() || old.ends_with("\n\n") { "" } else { "\n" };
            format!("{old}{gap}{part}\n")
        }
        Some((head, tail)) => format!("{head}{part}{tail}"),
    })
}

/// Returns the text before and after the part of a table's section; `None` where there is none yet.
pub fn place<'a>(old: &'a str, table: &str, section: Option<&str>) -> Result<Option<(&'a str, &'a str)>, Failure> {
    let (begin, end) = markers(table, section);
    match (old.split_once(&begin), old.split_once(&end)) {
        (None, None) => Ok(None),
        (Some((head, _)), Some((until, tail))) if until.len() >= head.len() => Ok(Some((head, tail))),
        _ => Err(Failure::new(format!("the markers of table {table} do not match"))),
    }
}

fn table(report: &Report) -> Result<String, Failure> {
    let columns = measured_columns(report);
    let mut out = format!("\n### {}\n\n", report.title);
    for line in provenance(report) {
        out.push_str(&format!("- {}\n", escape(&line)));
    }
    let sections = sections(report);
    for section in &sections {
        heading(&mut out, &section.title, report, &columns);
        for row in &section.rows {
            let entries =
                columns.iter().map(|column| row.entries.get(*column).copied().flatten().map(|entry| (*column, entry)));
            let cells = entries.map(|entry| {
                entry.map_or_else(
                    || "-".to_owned(),
                    |(column, entry)| cell(report, column, &row.unit, entry.rate, entry.ratio),
                )
            });
            out.push_str(&format!("| {} | {} |\n", escape(&row.title), cells.collect::<Vec<String>>().join(" | ")));
        }
    }
    let counts = counts(report);
    if !counts.is_empty() {
        heading(&mut out, COUNTS, report, &columns);
    }
    for row in counts {
        let cells = columns
            .iter()
            .map(|column| row.values.get(*column).copied().flatten().map_or_else(|| "-".to_owned(), count));
        out.push_str(&format!("| {} | {} |\n", escape(&row.title), cells.collect::<Vec<String>>().join(" | ")));
    }
    let means: Vec<String> = columns
        .iter()
        .filter_map(|column| {
            Some((report.targets.get(*column)?, overall(report, &sections).get(*column).copied().flatten()?))
        })
        .filter(|(target, _)| target.id != target.baseline)
        .map(|(target, mean)| format!("{} {}", escape(&target.title), ratio(mean)))
        .collect();
    out.push_str(&format!("\nMean over all rows: {}.\n", means.join(", ")));
    for remark in remarks(report) {
        out.push_str(&format!("\n- {}", escape(&remark)));
    }
    out.push_str(&promises(&figures::judge_table(report)?));
    Ok(out)
}

fn heading(out: &mut String, title: &str, report: &Report, columns: &[usize]) {
    out.push_str(&format!("\n#### {}\n\n| test |", escape(title)));
    for target in columns.iter().filter_map(|column| report.targets.get(*column)) {
        out.push_str(&format!(" {} |", escape(&target.title)));
    }
    out.push_str(&format!("\n|---|{}\n", "---:|".repeat(columns.len())));
}

fn promises(verdicts: &[Verdict]) -> String {
    if verdicts.iter().all(|verdict| verdict.reached.is_none()) {
        return "\n".to_owned();
    }
    format!("\n#### Promised and reached\n\n```\n{}```\n\n", figures::text(verdicts))
}

fn cell(report: &Report, column: usize, unit: &str, own_rate: f64, own_ratio: f64) -> String {
    match report.targets.get(column) {
        Some(target) if target.id == target.baseline => rate(own_rate, unit),
        _ => ratio(own_ratio),
    }
}

fn escape(text: &str) -> String {
    text.replace('|', "\\|").replace('<', "&lt;")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sample_report::report;

    #[test]
    fn prose_round_the_markers_stays() {
        let (begin, end) = markers("mirror", None);
        let old = format!("# Numbers\n\nBefore.\n\n{begin}\nstale\n{end}\n\nAfter.\n");
        let new = replace(&old, None, &report()).unwrap();
        assert!(new.starts_with("# Numbers\n\nBefore.\n\n<!-- nacre bench mirror: begin -->\n"));
        assert!(new.ends_with("<!-- nacre bench mirror: end -->\n\nAfter.\n"));
        assert!(!new.contains("stale"));
        assert_eq!(replace(&new, None, &report()).unwrap(), new);
    }

    #[test]
    fn sections_of_one_table_stand_side_by_side() {
        let all = replace(&replace("", None, &report()).unwrap(), Some("very-many"), &report()).unwrap();
        let (begin, end) = markers("mirror", Some("very-many"));
        assert_eq!((all.matches(&begin).count(), all.matches(&end).count()), (1, 1));
        assert_eq!(all.matches("<!-- nacre bench mirror: begin -->").count(), 1);
        assert_eq!(replace(&all, Some("very-many"), &report()).unwrap(), all);
        assert_eq!(replace(&all, None, &report()).unwrap(), all);
    }

    #[test]
    fn cells_and_escapes() {
        let text = replace("", None, &report()).unwrap();
        assert!(text.contains("| test | direct | bindfs |\n|---|---:|---:|\n"), "{text}");
        assert!(text.contains("| stat, again | 1.00 k/s | 2.00x |\n"), "{text}");
        assert!(text.contains("| full: over the limit | - | 4096 |\n"), "{text}");
        assert!(text.contains("nothing is mounted \\| at all"));
        assert!(text.contains("a &lt;note>"));
    }

    #[test]
    fn unpaired_markers_are_refused() {
        let (begin, end) = markers("mirror", None);
        assert!(replace(&format!("{begin}\n"), None, &report()).is_err());
        assert!(replace(&format!("{end}\n{begin}\n"), None, &report()).is_err());
    }
}
