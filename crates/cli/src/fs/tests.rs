//! Command lines into orders, answers into text.

use super::{
    args,
    command::{self, DiffForm, FsVerb, Get, Show, TableForm},
    diff, list,
};
use nacre_admin::fs::{Difference, FileKind, From, FsRequest, How, ListedObject, NewValue, ObjectType, Shown};

fn order(line: &str) -> Result<FsVerb, String> {
    let words = std::iter::once("fs").chain(line.split(' '));
    let matches = command::command().try_get_matches_from(words).map_err(|error| error.to_string())?;
    command::parse(&matches).map_err(|failure| failure.what)
}

fn shown(line: &str) -> Show {
    match order(line) {
        Ok(FsVerb::Show(show)) => show,
        other => panic!("{line}: {other:?}"),
    }
}

#[test]
fn command_lines_of_zfs_are_understood() {
    for line in [
        "create -p -o compression=lz4 -o atime=off t/a/b",
        "destroy -rRfnvp t/a",
        "destroy -d t/a@1,2%5",
        "snapshot -r t@1 u@2",
        "snap t@1",
        "rollback -rRf t@1",
        "clone -p -o x:y=z t@1 t/c",
        "promote t/c",
        "rename -pr t@1 @2",
        "rename t/a t/b",
        "list -Hpr -t all -o name,used -s used -S name t",
        "ls",
        "get -rHp -s local,received -o value all t/a",
        "get -d 1 -t filesystem used,avail",
        "set quota=10G user:x=a=b t/a u/b",
        "inherit -rS compression t/a",
        "mount",
        "mount -a",
        "mount -o ro,noexec t/a",
        "umount -f /srv",
        "unmount -a",
        "hold -r keep t@1 t@2",
        "holds -rHp t@1",
        "release keep t@1",
        "bookmark t@1 #m",
        "diff -FHt t@1 @2",
        "diff -h t@1",
        "userspace -Hnpi -o name,used -S used t",
        "groupspace -t all t",
    ] {
        assert!(order(line).is_ok(), "{line}: {:?}", order(line));
    }
}

#[test]
fn what_makes_no_sense_is_refused_with_a_reason() {
    for (line, reason) in [
        ("create", "required"),
        ("create -o nothing t/a", "missing '='"),
        ("create -o a:b=1 -o a:b=2 t/a", "specified multiple times"),
        ("list -o nosuch", "bad property list: invalid property 'nosuch'"),
        ("get nosuch t", "bad property list: invalid property 'nosuch'"),
        ("get -s nowhere used t", "invalid source"),
        ("list -t nothing", "invalid type"),
        ("set quota", "missing property=value argument"),
        ("set quota t/a", "missing property=value argument"),
        ("set quota=1G", "missing dataset name"),
        ("set quota=1G other=2", "missing dataset name"),
        ("set quota=1x t/a", "cannot set property for 't/a': invalid numeric suffix 'x'"),
        ("set nosuch=1 t/a", "cannot set property for 't/a': invalid property 'nosuch'"),
        ("inherit used t/a", "'used' is readonly"),
        ("inherit quota t/a", "'quota' property cannot be inherited"),
        ("rename t/a u/a", "datasets must be within same pool"),
        ("clone t@1 u/c", "source and target pools differ"),
        ("frobnicate", "unrecognized command 'frobnicate'"),
        ("userspace -o size t", "invalid field"),
        ("mount -a t/a", "cannot be used with"),
    ] {
        let refused = order(line).unwrap_err();
        assert!(refused.contains(reason), "{line}: {refused}");
    }
}

#[test]
fn words_become_requests() {
    match order("rename t/a@1 @2").unwrap() {
        FsVerb::Ask { pool, request: FsRequest::Rename(rename) } => {
            assert_eq!((pool.as_str(), rename.to.as_str()), ("t", "@2"))
        }
        other => panic!("{other:?}"),
    }
    match order("bookmark t/a@1 #m").unwrap() {
        FsVerb::Ask { request: FsRequest::Bookmark { of, name }, .. } => {
            assert_eq!((of.as_str(), name.as_str()), ("t/a@1", "t/a#m"))
        }
        other => panic!("{other:?}"),
    }
    match order("set userquota@0=1G atime=off t/a").unwrap() {
        FsVerb::Set(set) => {
            assert_eq!(set.properties[0], ("userquota@0".to_owned(), NewValue::Local("1G".to_owned())));
            assert_eq!(set.names, ["t/a"]);
        }
        other => panic!("{other:?}"),
    }
    assert_eq!(args::pool("t/a@1"), "t");
}

#[test]
fn how_deep_a_listing_goes_follows_what_is_asked() {
    assert_eq!(shown("list").listing.depth, None);
    assert_eq!(shown("list t").listing.depth, Some(0));
    assert_eq!(shown("list -r t").listing.depth, None);
    assert_eq!(shown("list -d 2 t").listing.depth, Some(2));
    assert_eq!(shown("list -t snapshot t").listing.depth, Some(1));
    assert_eq!(shown("list -t all t").listing.depth, Some(0));
    assert_eq!(shown("list -o space").listing.properties.unwrap().len(), 7);
    assert_eq!(shown("get all t").listing.properties, None);
    assert_eq!(
        shown("list -s used -S name -s avail").order,
        [("used".into(), false), ("name".into(), true), ("avail".into(), false)]
    );
}

fn listed(name: &str, created: u64, used: &str) -> ListedObject {
    let is = if name.contains('@') { ObjectType::Snapshot } else { ObjectType::Filesystem };
    let value = Shown { property: "used".to_owned(), value: Some(used.to_owned()), source: From::None, received: None };
    ListedObject { name: name.to_owned(), is, created, values: vec![value] }
}

fn names(objects: &[ListedObject]) -> Vec<&str> {
    objects.iter().map(|listed| listed.name.as_str()).collect()
}

#[test]
fn objects_stand_in_the_order_of_zfs() {
    let mut objects = vec![
        listed("t/b", 9, "5"),
        listed("t@b", 2, "7"),
        listed("t/a", 4, "100"),
        listed("t@a", 3, "20"),
        listed("t", 1, "1"),
        listed("t/a@x", 5, "6"),
    ];
    list::sort(&mut objects, &[]);
    assert_eq!(names(&objects), ["t", "t@b", "t@a", "t/a", "t/a@x", "t/b"]);
    list::sort(&mut objects, &[("used".to_owned(), true)]);
    assert_eq!(names(&objects), ["t/a", "t@a", "t@b", "t/a@x", "t/b", "t"]);
    list::sort(&mut objects, &[("name".to_owned(), false)]);
    assert_eq!(names(&objects), ["t", "t/a", "t/a@x", "t/b", "t@a", "t@b"]);
}

#[test]
fn tables_are_for_people_and_for_scripts() {
    let objects = [listed("t", 1, "1048576"), listed("t@a", 2, "0")];
    let columns = ["name", "used", "mountpoint"].map(str::to_owned);
    let form = TableForm::default();
    assert_eq!(list::table(&objects, &columns, form), "NAME  USED  MOUNTPOINT\nt       1M  -\nt@a     0B  -\n");
    let scripted = TableForm { scripted: true, exact: true, ..TableForm::default() };
    assert_eq!(list::table(&objects, &columns, scripted), "t\t1048576\t-\nt@a\t0\t-\n");
    let get = Get { fields: ["name", "property", "value", "source"].map(str::to_owned).to_vec(), sources: Vec::new() };
    let text = list::properties(&objects, &get, form, &|name| name.to_owned());
    assert_eq!(text, "NAME  PROPERTY  VALUE  SOURCE\nt     used      1M     -\nt@a   used      0B     -\n");
    let local = Get { sources: vec!["local".to_owned()], ..get };
    assert_eq!(list::properties(&objects, &local, form, &|name| name.to_owned()), "");
}

#[test]
fn differences_are_told_as_zfs_tells_them() {
    let of = |how, path: &[u8], kind| Difference { how, path: path.to_vec(), kind, changed: (5, 7) };
    let plain = DiffForm::default();
    let all = DiffForm { types: true, scripted: true, times: true };
    for (difference, form, wanted) in [
        (of(How::Modified(0), b"/t/", FileKind::Directory), plain, "M\t/t/\n"),
        (of(How::Modified(1), b"/t/f", FileKind::File), plain, "M\t/t/f\t(+1)\n"),
        (of(How::Added, b"/t/a b\xff", FileKind::File), plain, "+\t/t/a\\0040b\\0377\n"),
        (of(How::Removed, b"/t/l", FileKind::Symlink), DiffForm { types: true, ..plain }, "-\t@\t/t/l\n"),
        (of(How::Renamed(b"/t/old".to_vec()), b"/t/new", FileKind::File), plain, "R\t/t/old -> /t/new\n"),
        (of(How::Renamed(b"/t/old".to_vec()), b"/t/new", FileKind::File), all, "5.000000007\tR\tF\t/t/old\t/t/new\n"),
    ] {
        assert_eq!(diff::line(&difference, form), wanted);
    }
}
