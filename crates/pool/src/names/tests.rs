//! Names: accepted ones, and the errors of others.

use super::*;
use proptest::prelude::*;

#[test]
fn names_are_taken_apart() {
    assert_eq!(Name::parse("tank"), Ok(Name::Filesystem("tank")));
    assert_eq!(Name::parse("tank/a b/c-d_e.f:g"), Ok(Name::Filesystem("tank/a b/c-d_e.f:g")));
    assert_eq!(Name::parse("tank/a@x"), Ok(Name::Snapshot { filesystem: "tank/a", snapshot: "x" }));
    assert_eq!(Name::parse("tank#m"), Ok(Name::Bookmark { filesystem: "tank", bookmark: "m" }));
    assert_eq!(Name::parse("tank/a@x").unwrap().pool(), "tank");
    assert_eq!(Name::snapshot("tank@x"), Ok(("tank", "x")));
    assert_eq!(Name::bookmark("tank/b#x"), Ok(("tank/b", "x")));
    assert_eq!(split_parent("tank/a/b"), Ok(("tank/a", "b")));
}

#[test]
fn what_is_wrong_is_said_in_the_words_of_zfs() {
    let filesystem = |name| Name::filesystem(name).unwrap_err().to_string();
    let long = format!("t/{}", "x".repeat(256));
    let deep = format!("t{}", "/x".repeat(600));
    for (name, what) in [
        ("t/a@b", "snapshot delimiter '@' in filesystem name"),
        ("t/a#b", "bookmark delimiter '#' in filesystem name"),
        ("t/", "trailing slash in name"),
        ("/t", "leading slash in name"),
        ("t//b", "empty component in name"),
        ("t/a$b", "invalid character '$' in name"),
        ("t/a%b", "invalid character '%' in name"),
        ("t/\u{e4}", "invalid character '\u{e4}' in name"),
        ("t/..", "parent reference, '..' is found in name"),
        ("t/./a", "self reference, '.' is found in name"),
        ("9t/a", "name must begin with a letter"),
        ("", "name is empty"),
        (long.as_str(), "name is too long"),
        (deep.as_str(), "name is too long"),
    ] {
        assert_eq!(filesystem(name), what, "{name}");
    }
    let snapshot = |name| Name::snapshot(name).unwrap_err().to_string();
    assert_eq!(snapshot("t/v"), "missing '@' delimiter in snapshot name");
    assert_eq!(snapshot("t/v@"), "empty component in name");
    assert_eq!(snapshot("t/v@a@b"), "multiple '@' and/or '#' delimiters in name");
    assert_eq!(snapshot("t/v@a/b"), "invalid character '/' in name");
    assert_eq!(snapshot("@a"), "name is empty");
    assert_eq!(Name::bookmark("t@a").unwrap_err(), NameError::NoBookmarkDelimiter);
    assert_eq!(split_parent("t").unwrap_err().to_string(), "missing dataset name");
}

#[test]
fn names_of_pools() {
    for name in ["tank", "t", "a b", "logs", "disk", "file", "my-pool_1.2:3", "caches", "c", "ca0", "C0"] {
        assert_eq!(check_new_pool(name), Ok(()), "{name}");
    }
    for name in [
        "mirror", "mirrorx", "mirror-1", "raidz", "raidz1", "draid", "spare", "spares", "log", "cache", "special",
        "dedup",
    ] {
        assert_eq!(check_new_pool(name), Err(NameError::Reserved), "{name}");
    }
    for (name, error) in [
        ("", NameError::Empty),
        ("c0", NameError::DiskLike),
        ("c0t0d0", NameError::DiskLike),
        ("9a", NameError::NoLetter),
        ("_a", NameError::NoLetter),
        ("a/b", NameError::InvalidPoolCharacter('/')),
        ("a@b", NameError::InvalidPoolCharacter('@')),
        ("a%b", NameError::InvalidPoolCharacter('%')),
        ("a ", NameError::InvalidPoolCharacter(' ')),
        ("a\nb", NameError::InvalidPoolCharacter('\n')),
    ] {
        assert_eq!(check_new_pool(name), Err(error), "{name:?}");
    }
    assert_eq!(check_new_pool(&"p".repeat(255)), Ok(()));
    assert_eq!(check_new_pool(&"p".repeat(256)), Err(NameError::TooLong));
}

#[test]
fn selections_of_snapshots() {
    let existing = ["a", "b", "c", "d", "e"];
    let select = |argument: &str| SnapshotSelection::parse(argument).unwrap().select(&existing);
    assert_eq!(select("t@c"), Ok(vec![2]));
    assert_eq!(select("t@d,b,d"), Ok(vec![1, 3]));
    assert_eq!(select("t@b%d"), Ok(vec![1, 2, 3]));
    assert_eq!(select("t@%b"), Ok(vec![0, 1]));
    assert_eq!(select("t@d%"), Ok(vec![3, 4]));
    assert_eq!(select("t@%"), Ok(vec![0, 1, 2, 3, 4]));
    assert_eq!(select("t@a,c%d,e"), Ok(vec![0, 2, 3, 4]));
    assert_eq!(select("t@b%b"), Ok(vec![1]));
    assert_eq!(select("t@,a,,b,"), Ok(vec![0, 1]));
    assert_eq!(select("t@a,@"), Err(SelectionError::NoSnapshot("@".to_owned())));
    assert_eq!(select("t@x"), Err(SelectionError::NoSnapshot("x".to_owned())));
    assert_eq!(select("t@a%x"), Err(SelectionError::NoSnapshot("x".to_owned())));
    assert_eq!(select("t@d%b"), Err(SelectionError::Backwards("d".to_owned(), "b".to_owned())));
    assert_eq!(SnapshotSelection::parse("t@%").unwrap().select(&[]), Ok(vec![]));
    for (argument, error) in [
        ("t", NameError::NoSnapshotDelimiter),
        ("t@a@b", NameError::MultipleDelimiters),
        ("t@", NameError::EmptyComponent),
        ("t@a%b%c", NameError::InvalidCharacter('%')),
        ("@a", NameError::Empty),
        ("t@a/b", NameError::InvalidCharacter('/')),
    ] {
        assert_eq!(SnapshotSelection::parse(argument), Err(error), "{argument}");
    }
}

proptest! {
    #[test]
    fn any_text_is_a_name_or_an_error(name in "[a-c/@#%., \u{e4}]{0,12}") {
        if let Ok(parsed) = Name::parse(&name) {
            let again = match parsed {
                Name::Filesystem(filesystem) => filesystem.to_owned(),
                Name::Snapshot { filesystem, snapshot } => format!("{filesystem}@{snapshot}"),
                Name::Bookmark { filesystem, bookmark } => format!("{filesystem}#{bookmark}"),
            };
            prop_assert_eq!(again, name.as_str());
            prop_assert!(!name.contains("//") && !name.contains('%'));
        }
        let _ = check_new_pool(&name).map(|()| assert!(Name::parse(&name).is_ok()));
        let _ = SnapshotSelection::parse(&name).map(|selection| selection.select(&["a", "b"]));
    }
}
