//! Operations that fail change nothing, in memory neither.

use super::*;

#[test]
fn an_operation_that_fails_leaves_active_inodes_as_they_are() {
    let (files, frames) = empty();
    let root = files.root();
    let directory = make(&files, &root, b"directory", FileType::Directory);
    let below = make(&files, &directory, b"below", FileType::Directory);
    let file = make(&files, &root, b"file", FileType::Regular);
    files.link(&file, &root, b"other name").unwrap();
    files.set_attribute(&file, b"user.there", b"1", None, None).unwrap();
    let single = make(&files, &root, b"single", FileType::Regular);
    let nameless = files.make_nameless(&root, b"", true, &new(FileType::Regular)).unwrap().0;
    for file in [&file, &single, &nameless] {
        files.write(file, Some(0), &[1; 5000]).unwrap();
    }
    for directory in [&root, &directory, &below] {
        files.touch(directory);
    }
    let all = [&root, &directory, &below, &file, &single, &nameless];
    assert!(all.iter().all(|inode| inode.active.read().is_some()));
    let rows = || all.map(|inode| (files.attributes(inode).unwrap(), inode.is_nameless()));
    let before = rows();

    let watched = files.look_at_table(|table| Arc::clone(&table.1));
    watched.refuses.store(true, Ordering::Relaxed);
    let whiteout = new(FileType::Regular);
    let rename = |to: &[u8], replace| files.rename((&root, b"file"), (&root, to), replace);
    let operations: [(&str, &dyn Fn() -> Result<()>); 13] = [
        ("make", &|| files.make(&root, b"new", b"", &new(FileType::Regular)).map(drop)),
        ("make a directory", &|| files.make(&root, b"new", b"", &new(FileType::Directory)).map(drop)),
        ("link", &|| files.link(&file, &directory, b"new").map(drop)),
        ("link a nameless file", &|| files.link(&nameless, &directory, b"new").map(drop)),
        ("unlink one of two names", &|| files.unlink(&root, b"file")),
        ("unlink the only name", &|| files.unlink(&root, b"single")),
        ("remove a directory", &|| files.remove_directory(&directory, b"below")),
        ("rename", &|| files.rename((&directory, b"below"), (&root, b"new"), MayReplace::No)),
        ("replace", &|| rename(b"single", MayReplace::Yes)),
        ("exchange", &|| rename(b"directory", MayReplace::Exchange)),
        ("leave a whiteout", &|| {
            files.rename_leaving((&root, b"single"), (&root, b"file"), MayReplace::Yes, &whiteout)
        }),
        ("set an attribute", &|| files.set_attribute(&file, b"user.new", b"1", None, Some(0o777))),
        ("remove an attribute", &|| files.remove_attribute(&file, b"user.there")),
    ];
    for (name, operation) in operations {
        assert!(operation().is_err(), "{name}");
        assert_eq!(rows(), before, "{name}");
    }
    watched.refuses.store(false, Ordering::Relaxed);
    check(&files, &frames, &mut Vec::new());

    // What was refused can be done now.
    files.unlink(&root, b"file").unwrap();
    assert_eq!(content(&files, &files.look_up(&root, b"other name").unwrap().0), [1; 5000]);
    files.link(&nameless, &root, b"named").unwrap();
    files.remove_directory(&directory, b"below").unwrap();
    check(&files, &frames, &mut Vec::new());
}

#[test]
fn an_access_control_list_goes_with_the_bits_of_its_mask() {
    const LIST: &[u8] = b"system.posix_acl_access";
    let (files, frames) = empty();
    let file = make(&files, &files.root(), b"file", FileType::Regular);
    let watched = files.look_at_table(|table| Arc::clone(&table.1));
    *watched.history.lock() = Some(Vec::new());
    files.set_attribute(&file, LIST, b"user bob may write", None, Some(0o660)).unwrap();
    files.remove_attribute_setting_mode(&file, LIST, 0o600).unwrap();
    let nothing = files.remove_attribute_setting_mode(&file, LIST, 0o666);
    assert!(matches!(nothing, Err(FileError::NoData)), "{nothing:?}");
    let history = watched.history.lock().take().unwrap();
    let states = history.iter().map(|rows| {
        let row = InodeRow::decode(&rows[keys::inode(file.number()).as_slice()]).unwrap();
        (rows.contains_key(keys::xattr(file.number(), LIST).as_slice()), row.mode & 0o7777)
    });
    assert_eq!(states.collect::<Vec<_>>(), [(true, 0o660), (false, 0o600)]);
    check(&files, &frames, &mut Vec::new());
}
