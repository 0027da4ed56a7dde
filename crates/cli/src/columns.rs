//! Tables for people and for scripts: the same rows, aligned or separated by single tabs.
//!
//! Used by `status`, `top`, `cage status` and `union list`. Pure: text out, nothing printed.

use crate::clap_args::View;
use nacre_daemon::failure::Failure;

/// Alignment of a column.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Align {
    /// Words.
    Left,
    /// Numbers.
    Right,
}

/// A column of a table of `T`: its name, its heading, its alignment, and its cell for a row, with
/// exact numbers or rounded for people.
pub struct Column<T> {
    pub name: &'static str,
    heading: &'static str,
    align: Align,
    cell: fn(&T, bool) -> String,
}

/// Returns a column of words.
pub const fn left<T>(name: &'static str, heading: &'static str, cell: fn(&T, bool) -> String) -> Column<T> {
    Column { name, heading, align: Align::Left, cell }
}

/// Returns a column of numbers.
pub const fn right<T>(name: &'static str, heading: &'static str, cell: fn(&T, bool) -> String) -> Column<T> {
    Column { name, heading, align: Align::Right, cell }
}

/// Returns the columns that a view names; the default columns where it names none (`None`: all).
///
/// # Errors
/// A column that does not exist.
pub fn chosen<T>(
    columns: &'static [Column<T>],
    usual: Option<&[&str]>,
    view: &View,
) -> Result<Vec<&'static Column<T>>, Failure> {
    let find = |name: &str| {
        let unknown = || {
            let names: Vec<&str> = columns.iter().map(|column| column.name).collect();
            Failure::usage(format!("there is no column \"{name}\"")).next(format!("there are: {}", names.join(", ")))
        };
        columns.iter().find(|column| column.name == name).ok_or_else(unknown)
    };
    match (&view.columns, usual) {
        (Some(names), _) if !names.iter().any(|name| name == "all") => names.iter().map(|name| find(name)).collect(),
        (None, Some(names)) => names.iter().map(|name| find(name)).collect(),
        _ => Ok(columns.iter().collect()),
    }
}

/// Formats the rows in the form that the view asks for.
pub fn table<T>(of: &[T], columns: &[&Column<T>], view: &View, bold: bool) -> String {
    let row = |one: &T| columns.iter().map(|column| (column.cell)(one, view.exact)).collect();
    let rows: Vec<Vec<String>> = of.iter().map(row).collect();
    if view.scripted {
        return scripted(&rows);
    }
    let headings: Vec<(&str, Align)> = columns.iter().map(|column| (column.heading, column.align)).collect();
    aligned(&headings, &rows, bold)
}

/// Formats rows under headings, columns as wide as their widest cell; the last column is not
/// padded.
pub fn aligned(headings: &[(&str, Align)], rows: &[Vec<String>], bold: bool) -> String {
    let width = |column: usize| {
        let cells = rows.iter().filter_map(|row| row.get(column)).map(|cell| cell.chars().count());
        cells.chain(headings.get(column).map(|(heading, _)| heading.len())).max().unwrap_or(0)
    };
    let widths: Vec<usize> = (0..headings.len()).map(width).collect();
    let line = |cells: &[&str]| {
        let mut line = String::new();
        for (place, ((cell, width), (_, align))) in cells.iter().zip(&widths).zip(headings).enumerate() {
            if place > 0 {
                line.push_str("  ");
            }
            match align {
                Align::Left => line.push_str(&format!("{cell:<width$}")),
                Align::Right => line.push_str(&format!("{cell:>width$}")),
            }
        }
        line.truncate(line.trim_end().len());
        line
    };
    let head: Vec<&str> = headings.iter().map(|(heading, _)| *heading).collect();
    let mut text = line(&head);
    if bold {
        text = format!("\x1b[1m{text}\x1b[0m");
    }
    text.push('\n');
    for row in rows {
        let cells: Vec<&str> = row.iter().map(String::as_str).collect();
        text.push_str(&line(&cells));
        text.push('\n');
    }
    text
}

/// Formats rows without headings, one tab between cells.
pub fn scripted(rows: &[Vec<String>]) -> String {
    rows.iter().map(|row| row.join("\t") + "\n").collect()
}

/// Formats a count for people: three or four digits and a decimal suffix.
pub fn count(number: u64) -> String {
    const SUFFIXES: [(&str, u64); 4] = [("T", 1_000_000_000_000), ("G", 1_000_000_000), ("M", 1_000_000), ("k", 1_000)];
    match SUFFIXES.iter().find(|(_, unit)| number >= unit * 10) {
        None => number.to_string(),
        Some((suffix, unit)) => {
            let tenths = number / (unit / 10);
            if tenths >= 1000 {
                format!("{}{suffix}", tenths / 10)
            } else {
                format!("{}.{}{suffix}", tenths / 10, tenths % 10)
            }
        }
    }
}

/// Formats a duration in nanoseconds for people.
pub fn nanoseconds(number: u64) -> String {
    match number {
        0..10_000 => format!("{number} ns"),
        10_000..10_000_000 => format!("{} us", number / 1_000),
        10_000_000..10_000_000_000 => format!("{} ms", number / 1_000_000),
        _ => format!("{} s", number / 1_000_000_000),
    }
}

/// Formats an uptime in seconds for people.
pub fn uptime(seconds: u64) -> String {
    let (minutes, hours, days) = (seconds / 60, seconds / 3600, seconds / 86_400);
    match seconds {
        0..120 => format!("{seconds} s"),
        120..7200 => format!("{minutes} min"),
        7200..172_800 => format!("{hours} h"),
        _ => format!("{days} d"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_line_up() {
        let rows = vec![
            vec!["/a".to_owned(), "5".to_owned(), "x".to_owned()],
            vec!["/long".to_owned(), "1234".to_owned(), String::new()],
        ];
        let headings = [("MOUNT", Align::Left), ("N", Align::Right), ("W", Align::Left)];
        assert_eq!(aligned(&headings, &rows, false), "MOUNT     N  W\n/a        5  x\n/long  1234\n");
        assert_eq!(scripted(&rows), "/a\t5\tx\n/long\t1234\t\n");
    }

    #[test]
    fn numbers_are_short() {
        for (number, text) in [
            (0, "0"),
            (9_999, "9999"),
            (10_000, "10.0k"),
            (123_456, "123k"),
            (99_999_999, "99.9M"),
            (u64::MAX, "18446744T"),
        ] {
            assert_eq!(count(number), text);
        }
        for (number, text) in
            [(9_999, "9999 ns"), (10_000, "10 us"), (12_345_678, "12 ms"), (u64::MAX, "18446744073 s")]
        {
            assert_eq!(nanoseconds(number), text);
        }
        for (number, text) in [(119, "119 s"), (120, "2 min"), (7200, "2 h"), (172_800, "2 d")] {
            assert_eq!(uptime(number), text);
        }
    }
}
