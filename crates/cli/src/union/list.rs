//! `nacre union list`: branches as a table, for scripts, or as JSON. Pure.

use crate::{
    clap_args::View,
    columns::{self, Column, left, right},
};
use nacre_daemon::{failure::Failure, union::report::BranchReport};
use nacre_layers::size::Size;

const COLUMNS: &[Column<BranchReport>] = &[
    left("mountpoint", "MOUNTPOINT", |branch, _| branch.mountpoint.clone()),
    right("place", "PLACE", |branch, _| if branch.place == 0 { "-".to_owned() } else { branch.place.to_string() }),
    left("branch", "BRANCH", |branch, _| branch.branch.clone()),
    left("mode", "MODE", |branch, _| branch.mode.clone()),
    right("size", "SIZE", |branch, exact| bytes(branch.size, exact)),
    right("used", "USED", |branch, exact| bytes(branch.used, exact)),
    right("free", "FREE", |branch, exact| bytes(branch.free, exact)),
    right("use%", "USE%", |branch, exact| match branch.percent() {
        Some(percent) if exact => percent.to_string(),
        Some(percent) => format!("{percent}%"),
        None => "-".to_owned(),
    }),
    right("open-files", "OPEN", |branch, _| branch.open_files.to_string()),
    left("state", "STATE", |branch, _| branch.state.clone()),
];

fn bytes(bytes: Option<u64>, exact: bool) -> String {
    match bytes {
        None => "-".to_owned(),
        Some(bytes) if exact => bytes.to_string(),
        Some(bytes) => Size::new(bytes).short(),
    }
}

/// Returns the text to print.
///
/// # Errors
/// A column that does not exist.
pub fn text(branches: &[BranchReport], view: &View, bold: bool) -> Result<String, Failure> {
    let chosen = columns::chosen(COLUMNS, None, view)?;
    if view.json {
        return super::run::json(&branches);
    }
    Ok(match branches.is_empty() && !view.scripted {
        true => "no unions\n".to_owned(),
        false => columns::table(branches, &chosen, view, bold),
    })
}

/// Formats the branches of one mount for people.
pub fn within(branches: &[BranchReport], exact: bool) -> String {
    let chosen: Vec<_> = COLUMNS.iter().filter(|column| column.name != "mountpoint").collect();
    columns::table(branches, &chosen, &View { exact, ..View::default() }, false)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn branch() -> BranchReport {
        BranchReport {
            mountpoint: "/m".to_owned(),
            place: 1,
            branch: "/ssd".to_owned(),
            mode: "rw".to_owned(),
            state: "active".to_owned(),
            size: Some(10 << 30),
            used: Some(5 << 30),
            free: Some(5 << 30),
            open_files: 3,
        }
    }

    #[test]
    fn people_get_headings_and_scripts_exact_numbers() {
        let told = text(&[branch()], &View::default(), false).unwrap();
        let words: Vec<&str> = told.lines().nth(1).unwrap().split_whitespace().collect();
        assert_eq!(words, ["/m", "1", "/ssd", "rw", "10G", "5G", "5G", "50%", "3", "active"]);
        let columns = Some(vec!["branch".to_owned(), "free".to_owned(), "use%".to_owned()]);
        let view = View { scripted: true, exact: true, columns, ..View::default() };
        assert_eq!(text(&[branch()], &view, false).unwrap(), "/ssd\t5368709120\t50\n");
        let wrong = View { columns: Some(vec!["colour".to_owned()]), ..View::default() };
        assert!(text(&[branch()], &wrong, false).unwrap_err().next.contains("open-files"));
        assert_eq!(text(&[], &View::default(), false).unwrap(), "no unions\n");
    }
}
