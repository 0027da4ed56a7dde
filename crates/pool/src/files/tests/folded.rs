//! File systems with name folding.

use super::*;
use crate::rows::folding::Normal;

fn of(folding: Folding) -> (MapFiles, Arc<MapFrames>) {
    let frames = Arc::new(MapFrames { room: AtomicI64::new(-1), ..MapFrames::default() });
    // Whatever the pool's default is: with folding names are hashed in order.
    (
        Files::format(
            config(&frames),
            MapTable::default(),
            NewFiles { hashing: keys::Hashing::Whole, folding, seed: 99, owner: (0, 0) },
        )
        .unwrap(),
        frames,
    )
}

fn insensitive() -> (MapFiles, Arc<MapFrames>) {
    of(Folding { insensitive: true, normal: Normal::None })
}

fn listed(files: &MapFiles) -> String {
    names(files, &files.root())
        .iter()
        .map(|name| String::from_utf8_lossy(name).into_owned())
        .collect::<Vec<_>>()
        .join(" ")
}

#[test]
fn a_name_is_found_by_any_case_and_keeps_its_own() {
    let (files, frames) = insensitive();
    let root = files.root();
    let file = make(&files, &root, b"Foo7.TXT", FileType::Regular);
    let d = make(&files, &root, "D\u{e9}".as_bytes(), FileType::Directory);
    assert_eq!(files.look_up(&root, b"foo7.txt").unwrap().0.number(), file.number());
    assert_eq!(files.look_up(&root, "d\u{c9}".as_bytes()).unwrap().0.number(), d.number());
    assert!(matches!(files.look_up(&root, b"foo8.txt"), Err(FileError::NotFound)));
    assert!(matches!(files.make(&root, b"FOO7.txt", b"", &new(FileType::Regular)), Err(FileError::Exists)));
    assert!(matches!(files.link(&file, &root, b"FOO7.txt"), Err(FileError::Exists)));
    files.link(&file, &d, b"FOO7.txt").unwrap();
    assert_eq!(listed(&files), "Foo7.TXT D\u{e9}");
    check(&files, &frames, &mut Vec::new());
    files.unlink(&root, b"fOO7.tXT").unwrap();
    files.unlink(&d, b"foo7.TXT").unwrap();
    files.remove_directory(&root, "d\u{e9}".as_bytes()).unwrap();
    assert_eq!((listed(&files), files.attributes(&file).unwrap().links), (String::new(), 0));
    check(&files, &frames, &mut Vec::new());
}

#[test]
fn renames_give_the_spelling_that_is_asked_for() {
    let (files, frames) = insensitive();
    let root = files.root();
    let rename =
        |from: &str, to: &str, replace| files.rename((&root, from.as_bytes()), (&root, to.as_bytes()), replace);
    let [a, b] = ["one", "two"].map(|name| make(&files, &root, name.as_bytes(), FileType::Regular));
    let d = make(&files, &root, b"dir", FileType::Directory);
    // Only the case changes, of files and directories, even where nothing may be replaced.
    rename("ONE", "One", MayReplace::Yes).unwrap();
    rename("dir", "DIR", MayReplace::No).unwrap();
    assert_eq!((listed(&files), files.path(&d).unwrap().unwrap()), ("One two DIR".to_owned(), b"DIR".to_vec()));
    for replace in [MayReplace::Yes, MayReplace::No, MayReplace::Exchange] {
        rename("oNE", "One", replace).unwrap();
    }
    rename("one", "ONE", MayReplace::Exchange).unwrap();
    assert_eq!(listed(&files), "One two DIR");
    assert!(matches!(rename("one", "TWO", MayReplace::No), Err(FileError::Exists)));
    assert!(matches!(files.rename((&root, b"dir"), (&d, b"x"), MayReplace::Yes), Err(FileError::Invalid)));
    // Exchanged names keep their spellings, replaced ones take the new one.
    rename("ONE", "TWO", MayReplace::Exchange).unwrap();
    assert_eq!(
        (listed(&files), files.look_up(&root, b"ONE").unwrap().0.number()),
        ("One two DIR".to_owned(), b.number())
    );
    check(&files, &frames, &mut Vec::new());
    rename("two", "ONE", MayReplace::Yes).unwrap();
    assert_eq!((listed(&files), files.look_up(&root, b"one").unwrap().0.number()), ("ONE DIR".to_owned(), a.number()));
    assert_eq!(files.attributes(&b).unwrap().links, 0);
    // The whiteout of a rename has the spelling of the old name.
    files.rename_leaving((&root, b"one"), (&d, b"moved"), MayReplace::No, &new(FileType::CharDevice)).unwrap();
    files.rename_leaving((&root, b"one"), (&root, b"One"), MayReplace::Yes, &new(FileType::CharDevice)).unwrap();
    assert_eq!((listed(&files), names(&files, &d)), ("ONE DIR".to_owned(), vec![b"moved".to_vec()]));
    drop((a, b));
    files.free_released(u64::MAX).unwrap();
    check(&files, &frames, &mut Vec::new());
}

#[test]
fn normalized_names_are_utf_8_and_the_same_in_all_forms() {
    let (files, frames) = of(Folding { insensitive: false, normal: Normal::Canonical });
    let root = files.root();
    let file = make(&files, &root, "caf\u{e9}".as_bytes(), FileType::Regular);
    assert_eq!(files.look_up(&root, "cafe\u{301}".as_bytes()).unwrap().0.number(), file.number());
    assert!(matches!(files.look_up(&root, "CAF\u{c9}".as_bytes()), Err(FileError::NotFound)));
    assert_eq!(listed(&files), "caf\u{e9}");
    let not_utf8 = |outcome: Result<()>| assert!(matches!(outcome, Err(FileError::NotUtf8)));
    not_utf8(files.make(&root, b"\xff", b"", &new(FileType::Regular)).map(drop));
    not_utf8(files.link(&file, &root, b"\xff").map(drop));
    not_utf8(files.rename((&root, "caf\u{e9}".as_bytes()), (&root, b"\xff"), MayReplace::Yes));
    assert!(matches!(files.look_up(&root, b"\xff"), Err(FileError::NotFound)));
    check(&files, &frames, &mut Vec::new());
}

#[test]
fn names_have_to_be_utf_8_where_the_property_says_so() {
    let (files, _) = empty();
    let root = files.root();
    make(&files, &root, b"before \xff", FileType::Regular);
    files.set_rules(Rules { utf8_only: true, ..Rules::default() });
    assert!(matches!(files.make(&root, b"\xff", b"", &new(FileType::Regular)), Err(FileError::NotUtf8)));
    make(&files, &root, "\u{e9}".as_bytes(), FileType::Regular);
    // Existing names can be used, renamed and removed.
    assert!(files.look_up(&root, b"before \xff").is_ok());
    files.rename((&root, b"before \xff"), (&root, b"after"), MayReplace::No).unwrap();
    files.unlink(&root, b"after").unwrap();
}

proptest::proptest! {
    /// Against a map by the folded name.
    #[test]
    fn random_names_as_the_model(steps in proptest::collection::vec((0..4u8, "[aAbB\u{e9}\u{c9}]{1,2}", "[aAbB\u{e9}\u{c9}]{1,2}"), 1..60)) {
        let (files, frames) = insensitive();
        let root = files.root();
        let mut model: BTreeMap<String, (String, u64)> = BTreeMap::new();
        for (what, one, other) in &steps {
            let (low, low_other) = (one.to_lowercase(), other.to_lowercase());
            match what {
                0 | 1 => {
                    let made = files.make(&root, one.as_bytes(), b"", &new(FileType::Regular));
                    assert_eq!(made.is_ok(), !model.contains_key(&low));
                    if let Ok((inode, _)) = made {
                        model.insert(low, (one.clone(), inode.number()));
                    }
                }
                2 => assert_eq!(files.unlink(&root, one.as_bytes()).is_ok(), model.remove(&low).is_some()),
                _ => {
                    let done = files.rename((&root, one.as_bytes()), (&root, other.as_bytes()), MayReplace::Yes);
                    assert_eq!(done.is_ok(), model.contains_key(&low));
                    if let Some((_, number)) = model.remove(&low) {
                        model.insert(low_other, (other.clone(), number));
                    }
                }
            }
        }
        let mut there: Vec<String> = names(&files, &root).into_iter().map(|name| String::from_utf8(name).unwrap()).collect();
        there.sort();
        let mut wanted: Vec<String> = model.values().map(|(name, _)| name.clone()).collect();
        wanted.sort();
        assert_eq!(there, wanted);
        for (name, number) in model.values() {
            assert_eq!(files.look_up(&root, name.to_uppercase().as_bytes()).unwrap().0.number(), *number);
        }
        files.free_released(u64::MAX).unwrap();
        check(&files, &frames, &mut Vec::new());
    }
}
