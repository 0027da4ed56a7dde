//! Formats an event of the program as a line of a log.
//!
//! Used by [`super`] for every kind of log. Invariant: an event becomes exactly one line, whatever users have named
//! their files: each value is printable, and an ambiguous one is quoted.

use crate::report::printable;
use std::fmt::{self, Write};
use tracing::{
    Event, Level,
    field::{Field, Visit},
};

/// The longest value of a field, bytes.
const VALUE_MOST: usize = 4096;

/// An event as message and fields.
#[derive(Debug)]
pub(super) struct Line {
    pub level: Level,
    /// Message of the event.
    pub message: String,
    /// The other fields, printable.
    pub fields: Vec<(&'static str, String)>,
}

impl Line {
    pub fn of(event: &Event<'_>) -> Line {
        let mut line = Line { level: *event.metadata().level(), message: String::new(), fields: Vec::new() };
        event.record(&mut line);
        line
    }

    /// Returns the line without its level.
    pub fn text(&self) -> String {
        let mut text = self.message.clone();
        for (name, value) in &self.fields {
            let plain = !value.is_empty() && !value.contains([' ', '"', '=']);
            // Writing to a string cannot fail.
            let _ = match plain {
                true => write!(text, " {name}={value}"),
                false => write!(text, " {name}=\"{}\"", value.replace('"', "\\\"")),
            };
        }
        text
    }

    /// Returns the line with its level first, for users.
    pub fn shown(&self) -> String {
        format!("{:>5} {}", self.level, self.text())
    }

    fn put(&mut self, field: &Field, value: &str) {
        let mut value = clean(value);
        if value.len() > VALUE_MOST {
            cut(&mut value, VALUE_MOST);
            value.push_str("...");
        }
        match field.name() {
            "message" => self.message = value,
            name => self.fields.push((name, value)),
        }
    }
}

/// Shortens a text to at most `most` bytes, between two characters.
pub(super) fn cut(text: &mut String, most: usize) {
    let end = (0..=most.min(text.len())).rev().find(|end| text.is_char_boundary(*end));
    text.truncate(end.unwrap_or(0));
}

/// Makes a value printable; a printable one stays unchanged, also its backslashes: paths are escaped by the
/// callers.
fn clean(value: &str) -> String {
    if value.chars().any(char::is_control) { printable(value.as_bytes()) } else { value.to_owned() }
}

impl Visit for Line {
    fn record_str(&mut self, field: &Field, value: &str) {
        self.put(field, value);
    }

    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        self.put(field, &format!("{value:?}"));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nobody_writes_a_second_line() {
        let fields = vec![("cage", clean("/a\nERROR all is lost")), ("n", "5".to_owned()), ("why", String::new())];
        let line = Line { level: Level::WARN, message: "full".to_owned(), fields };
        assert_eq!(line.shown(), " WARN full cage=\"/a\\x0aERROR all is lost\" n=5 why=\"\"");
        assert_eq!(clean("a\u{85}b\x1b[1m"), "a\\xc2\\x85b\\x1b[1m");
        assert_eq!(clean("/a\\x0a"), "/a\\x0a");
    }
}
