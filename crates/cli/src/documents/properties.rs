//! The page nacre-properties(7): the sections of docs/fs.md and docs/pool.md that list properties. Called by
//! `documents.rs`.
//!
//! Invariant: the page has the content of the documents; of their Markdown, it supports paragraphs,
//! tables, code and links.

use clap_mangen::roff::{Inline, Roff, bold, roman};

const FILE_SYSTEMS: &str = include_str!("../../../../docs/fs.md");
const POOLS: &str = include_str!("../../../../docs/pool.md");

/// Returns the page as roff(7).
pub(super) fn page() -> String {
    let source = format!("nacre {}", env!("CARGO_PKG_VERSION"));
    let mut roff = Roff::new();
    roff.control("TH", ["NACRE-PROPERTIES", "7", "", &source, "nacre"]);
    roff.control("SH", ["NAME"]).text([roman("nacre-properties - properties of pools and file systems")]);
    roff.control("SH", ["DESCRIPTION"]);
    for (heading, document, section) in [
        ("Space of file systems", FILE_SYSTEMS, "Space"),
        ("Properties of file systems", FILE_SYSTEMS, "Properties"),
        ("Properties of pools", POOLS, "Properties of pools"),
    ] {
        roff.control("SS", [heading]);
        for block in section_of(document, section).split("\n\n") {
            put(&mut roff, block.trim());
        }
    }
    roff.control("SH", ["SEE ALSO"]);
    roff.text([bold("nacre-fs-set"), roman("(1), "), bold("nacre-fs-get"), roman("(1), ")]);
    roff.text([bold("nacre-pool-set"), roman("(1), "), bold("nacre-pool-get"), roman("(1)")]);
    roff.render()
}

/// Returns the text between a heading of a document and the next one.
fn section_of<'d>(document: &'d str, heading: &str) -> &'d str {
    let mut sections = document.split("\n## ");
    sections.find_map(|section| section.strip_prefix(heading)?.strip_prefix('\n')).unwrap_or_default()
}

/// Appends a paragraph or a table.
fn put(roff: &mut Roff, block: &str) {
    if !block.starts_with('|') {
        roff.control("PP", []).text(inlines(block));
        return;
    }
    // The heading and the line below it name columns.
    for row in block.lines().skip(2) {
        let cells: Vec<&str> = row.trim_matches('|').split('|').map(str::trim).collect();
        let Some((name, cells)) = cells.split_first() else { continue };
        let text = match cells {
            [values, default, meaning] => {
                [labelled("", values), labelled("default: ", default), (*meaning).to_owned()].join("")
            }
            cells => cells.join(" "),
        };
        roff.control("TP", []).text(inlines(name)).text(inlines(&text));
    }
}

/// Returns a cell as a sentence; nothing for an empty cell.
fn labelled(label: &str, cell: &str) -> String {
    if cell.is_empty() { String::new() } else { format!("{label}{cell}. ") }
}

/// Returns the text with code in bold, and without the targets of links.
fn inlines(text: &str) -> Vec<Inline> {
    let plain = text.replace('\n', " ");
    let mut inlines = Vec::new();
    for (index, part) in plain.split('`').enumerate() {
        inlines.push(if index % 2 == 1 { bold(part) } else { roman(without_links(part)) });
    }
    inlines
}

/// Returns the text with the names of links, without their targets.
fn without_links(text: &str) -> String {
    let mut kept = String::new();
    let mut rest = text;
    while let Some((before, link)) = rest.split_once("](") {
        let Some((_, after)) = link.split_once(')') else { break };
        kept.push_str(&before.replacen('[', "", 1));
        rest = after;
    }
    kept.push_str(rest);
    kept.replace('*', "")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_page_has_the_properties_and_no_markdown() {
        let page = page();
        for property in ["mountpoint", "userquota@NAME", "referenced", "failmode", "compression", "defaultuserquota"] {
            assert!(page.contains(property.replace('-', "\\-").as_str()), "{property}: {page}");
        }
        for markdown in ["](", "| ", "##", "`"] {
            assert!(!page.contains(markdown), "{markdown}: {page}");
        }
    }
}
