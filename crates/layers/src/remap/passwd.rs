//! Maps from a passwd or group file: the number in the third column and the name in the first. Pure
//! except for names, which a closure resolves.

use super::id_map::MapRule;
use std::io;

/// Makes one rule for each line whose name the local system knows; others are skipped with a
/// warning, empty lines and comments without. Forward, the file's number is shown as the local id;
/// reversed, the local id is shown as the file's number.
///
/// # Errors
/// Text for the user, with the line: too few columns, a malformed number, or a database that cannot
/// answer.
pub fn rules(
    text: &str,
    reversed: bool,
    resolve: &dyn Fn(&str) -> io::Result<Option<u32>>,
    warnings: &mut Vec<String>,
) -> Result<Vec<MapRule>, String> {
    let mut rules = Vec::new();
    for (index, line) in text.lines().enumerate() {
        if line.trim().is_empty() || line.starts_with('#') {
            continue;
        }
        let bad = |why: String| format!("line {}: {why}", index + 1);
        let mut columns = line.split(':');
        let (Some(name), Some(_), Some(number)) = (columns.next(), columns.next(), columns.next()) else {
            return Err(bad("there are less than three columns; is this a passwd or group file?".to_owned()));
        };
        let number: u32 = number
            .parse()
            .ok()
            .filter(|&id| id != u32::MAX)
            .ok_or_else(|| bad(format!("the third column \"{}\" is no id", number.escape_debug())))?;
        match resolve(name).map_err(|error| bad(format!("cannot look up \"{}\": {error}", name.escape_debug())))? {
            Some(local) if reversed => rules.push(MapRule::One(local, number)),
            Some(local) => rules.push(MapRule::One(number, local)),
            None => warnings.push(format!(
                "line {}: \"{}\" is not known on this system and is left out",
                index + 1,
                name.escape_debug()
            )),
        }
    }
    Ok(rules)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn resolve(name: &str) -> io::Result<Option<u32>> {
        Ok(match name {
            "alice" => Some(1000),
            "bob" => Some(1001),
            _ => None,
        })
    }

    #[test]
    fn both_directions_and_unknown_names() {
        let text = "alice:x:501:20::/:/bin/sh\n# comment\n\nghost:x:9:9\nbob:x:502\n";
        let mut warnings = Vec::new();
        assert_eq!(
            rules(text, false, &resolve, &mut warnings),
            Ok(vec![MapRule::One(501, 1000), MapRule::One(502, 1001)])
        );
        assert!(
            matches!(warnings.as_slice(), [one] if one.contains("line 4") && one.contains("ghost")),
            "{warnings:?}"
        );
        assert_eq!(
            rules(text, true, &resolve, &mut warnings),
            Ok(vec![MapRule::One(1000, 501), MapRule::One(1001, 502)])
        );
    }

    #[test]
    fn damaged_files_are_refused() {
        for (text, part) in [
            ("alice:x", "line 1"),
            ("alice:x:1\nbob:x:two", "line 2"),
            ("alice:x:-1", "no id"),
            ("alice:x:4294967295", "no id"),
        ] {
            assert!(rules(text, false, &resolve, &mut Vec::new()).is_err_and(|error| error.contains(part)), "{text}");
        }
        let down = |_: &str| Err(io::Error::other("directory service down"));
        assert!(
            rules("alice:x:1", false, &down, &mut Vec::new())
                .is_err_and(|error| error.contains("directory service down"))
        );
    }
}
